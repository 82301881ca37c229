"""Where every routed token goes: plans over expert loads, chunks of tokens, routing profiles."""
