"""Calls receivers outside the pool when a job ends: signed, at least once, by one monitor at a time.

`core` decides who may attempt what and when, `delivery` carries it out. How far a receiver has come is in its record;
before an attempt a monitor stores its claim there by compare-and-set, and the others wait until the claim is gone, or
has not changed for so long that its holder must be gone.
"""
