"""The thread that drives a device: what the next round is, and what the last one gave.

`work` has the thread and its queue, and `loop` a round. `roster` and `holdings` know who has a slot
and pages; `planning`, `prompts` and `device` begin work, and `reading` and `events` end it.
"""
