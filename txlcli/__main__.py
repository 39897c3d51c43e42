"""`python -m txlcli`, the same as `txl`."""

from txlcli.cli import main

if __name__ == "__main__":
    main()
