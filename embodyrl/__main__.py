"""`python -m embodyrl` is the same program as `embodyrl`."""

from embodyrl.cli.main import main

main()
