"""What a person types. One module a command; `main.py` says how a command is written."""
