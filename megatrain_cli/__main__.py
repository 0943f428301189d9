"""`python -m megatrain_cli` is the `megatrain` command."""

from megatrain_cli.cli.app import main

if __name__ == "__main__":
    main()
