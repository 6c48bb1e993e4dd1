"""The parts of bench.py: what they measure, one file a question, and what they measure it with."""
