"""The `cepheid` command. Each command imports what it needs when it runs, so that `cepheid --help` is instant."""


def main() -> None:
    try:
        from cepheid_cli.app import run

        run()
    except KeyboardInterrupt:  # where no command had begun: what runs ends in its own way
        raise SystemExit(130) from None
