#!/usr/bin/env bash
# Runs `pip install ARGS...` in the virtual environment of $1 and shows its progress on one line.
# pip's whole output goes to $1/pip.log; after an error its last lines are printed.
# usage: pip_install.sh VENV ARGS...
set -uo pipefail
venv=$1; shift
log=$venv/pip.log
if [ -t 1 ]; then width=$(tput cols 2>/dev/null || echo 80); else width=0; fi
"$venv/bin/python" -m pip install --no-compile --disable-pip-version-check --no-color --progress-bar off "$@" 2>&1 |
  tee "$log" |
  awk -v width="$width" '
    /^ *(Downloading|Using cached|Building|Installing|Successfully)/ {
      gsub(/^ +|https?:[^ ]*\//, "")
      if (width) { printf "\r\033[K  %s", substr($0, 1, width - 3); fflush() }
      else if (/^(Building|Installing)/) print "  " substr($0, 1, 110) "..."
      else if (/\([0-9.]+ MB\)/) print "  " $0
    }
    END { if (width) printf "\r\033[K" }'
status=${PIPESTATUS[0]}
if [ "$status" != 0 ]; then
  grep -v '^WARNING' "$log" | tail -n 20 >&2
  echo "pip failed with exit code $status. Its whole output is in $log." >&2
fi
exit "$status"
