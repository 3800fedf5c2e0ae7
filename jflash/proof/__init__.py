"""Losslessness on a device, and what the compiler made of a step.

`law` compares every way to decode with plain decoding, `check` a pair's drafts with its oracle,
`ops` a row's bits among other rows, `devices` one device with several, `under_load` an engine with
plain decoding, and `soak` a server with itself at rest. `faults` has what must be caught,
`right_logits` compares with float32, and `program` holds compiled steps to gates.
"""
