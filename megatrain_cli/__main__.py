"""The `megatrain` command; `python -m megatrain_cli` is the same."""

from megatrain_cli.cli.interrupt import fill_standard_numbers, settle_signals


def main() -> None:
    """Run the command line of this process and leave with its exit code."""
    fill_standard_numbers()
    settle_signals()
    from megatrain_cli.cli.app import main as run  # noqa: PLC0415  # takes a tenth of a second

    run()


if __name__ == "__main__":
    main()
