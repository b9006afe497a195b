"""The `cepheid` command. Each command imports what it needs when it runs, so that `cepheid --help` is instant."""


def main() -> None:
    try:
        from cepheid_cli.app import run

        run()
    except KeyboardInterrupt:  # no command had begun: running commands handle it themselves
        raise SystemExit(130) from None
