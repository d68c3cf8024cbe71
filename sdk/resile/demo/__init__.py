"""`resile demo`: two jobs share a pool of two hosts, and end with the bits of undisturbed runs.

story        what happens, when, and what makes it happen
recording    what was seen of the jobs meanwhile
undisturbed  the same two trainings, each alone on one worker
idle         how long slots were idle meanwhile
verdict      whether everything went as promised
chart        the picture
report       the same as one HTML file, with what happened and the sums

`digits.py`, what both jobs train, is a link to the example of that name, so that an installed wheel has it too.
"""
