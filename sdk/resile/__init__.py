"""Resile: elastic deep-learning training on machines that come and go, with the same bits every time."""
