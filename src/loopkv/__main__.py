"""``python -m loopkv``."""

from loopkv.cli.app import main

main()
