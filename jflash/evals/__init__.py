"""What a pair is worth, counted: right answers, acceptance lengths, seconds."""
