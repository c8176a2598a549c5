"""The errors of `turbomind`, one tree for the core and for Python.

Error
├── InvalidRequest      an argument is wrong: "NAME is VALUE, expected WHAT"; `param` is the name
│   └── ContextFull     the request can never fit the context or the page pool
├── Busy                the handle is generating
├── NotFound            no such handle, folder or hub repository
├── ModelError          a config, checkpoint or weight cannot be used; or arithmetic was not finite
├── EngineClosed        the engine has been closed
└── InternalError       a bug, or too little memory or open files; the engine continues
"""

from turbomind._C import (
    Busy,
    ContextFull,
    EngineClosed,
    Error,
    InternalError,
    InvalidRequest,
    ModelError,
    NotFound,
)

# The name of the wrong argument or setting, such as "top_k" or "stop_strings[1]"; None: of none.
# `turbomind.params.wrong()` sets it.
InvalidRequest.param = None

__all__ = [
    "Busy",
    "ContextFull",
    "EngineClosed",
    "Error",
    "InternalError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
]
