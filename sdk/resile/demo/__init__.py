"""`resile demo`: one training twice, with a changing number of workers and undisturbed, and whether they end alike.

`digits.py`, what it trains, is a link to the example of that name, so that an installed wheel has it too.
"""
