from cepheid_cli import main

main()
