"""The parts of bench.py, one question a file; measure.py is what all of them measure with."""
