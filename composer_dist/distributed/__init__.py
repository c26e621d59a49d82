"""Planning, sharding, delivering weights, following the optimizer, agreeing across ranks.

The words that the code uses, one noun for each thing:

- *part*: the elements of a tensor that one rank holds; a *shard* is a part under FSDP2.
- *slab*: a byte range of a file.
- *bucket*: tensors that are sent together; a *cargo* is one of them, with its destination.
- *layout*: how a tensor is cut over a mesh.
- *position*: a place in the training data. *key path*: a path in nested data.
- *unit*: modules whose parameters are gathered, and whose gradients are reduced, together.
- *tie*: one parameter under several names. *duplicate*: one module under several names.
- *plain parameter*: one that is not a DTensor after preparation.
- *name*: a parameter's or module's full name, without the segments that wrappers insert.
- *wish*: a request of the caller. *plan*: all decisions; once it is made, wishes are not read again.
- *kind*: model, optimizer or value, in a checkpoint.
- *sync*: which rank's weights are used when a model is prepared.

Each feature is a package: its `plan.py` decides (pure, on the meta device, no process group), its
`apply.py` carries the plan out (`recompute.py` for activations, `context.py` for context parallelism). The
optimizers need no plan: they follow (`optimizers/follow.py`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
