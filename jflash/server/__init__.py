"""The OpenAI-compatible server: HTTP, JSON and text over an engine that knows token ids only.

`app` has the routes, and `chat`, `completions` and `responses` the three that decode, over a
`service` that all requests share. `front` starts the `process` that speaks HTTP; `fleet` and
`relay` are for several servers.
"""
