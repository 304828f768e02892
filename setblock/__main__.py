"""`python -m setblock` and `torchrun -m setblock`: the command line."""

from setblock.cli import main

main()
