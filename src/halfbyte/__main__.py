"""`python -m halfbyte`: the command, where its script is not on the path."""

from halfbyte.cli.main import entry

entry()
