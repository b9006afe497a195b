"""The `cepheid` command. Each command imports what it needs when it runs, so that `cepheid --help` is instant."""


def main() -> None:
    from cepheid_cli.app import run

    run()
