"""The engine's executables, what goes into a call and what comes out of it.

`layout` has the sizes that all others take, `slots` the state, and `packing` the arrays of a call.
`programs` has the passes over prompts (`prefill`) and the calls of `steps`, of all slots or of some
(`some_slots`); `first_runs` times these, and `step_programs` chooses among them. `constrained` has
the steps with grammars.
"""
