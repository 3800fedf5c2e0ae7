"""Data sets answered and judged: right answers, acceptance lengths, tokens a second."""
