"""What travels between the notebook and its ranks: names, values, identities. Used at both ends.

To a rank, a job takes what its code needs. For a cell: `names` parses the source and follows its data flow to
the global names that it loads; those that the notebook has are pickled together, in one pickle, so that
objects which they share stay shared. For a call: the function and its arguments. Modules go by reference,
functions and classes of the notebook by value (cloudpickle). A value comes back the same way.

    cell ──names──> variables ──pickling──> pickle + large buffers ──shared_memory──> Payload ──> rank
                        │ refused: unpicklable finds the part, its path and size: CaptureError

Large buffers (arrays, tensors) are not copied into the pickle. They are written once into a memory file,
which every rank maps. A small payload travels inside its message.

For a session both ends keep an object table (`identity`): a key for each object that has been sent. What the
ranks have is sent as its key (`persistent_id`), so one object stays one object under any name. `walk` keeps a
digest of each object as it was sent, to notice a change in place; `push` replaces the content of an object.

Whatever names a part of a user's object (a value that cannot be sent, memory that is held, a variable of a
dead process group) takes the name from `parts`. `walk`, `push` and `nblaunch.diff` follow pickle instead,
because a value is sent or compared; `identity` follows the references that the garbage collector sees.

Invariants:
  * Capturing runs no code of the user's, but for what pickling runs anyway (`__reduce__`, `__getstate__`).
  * A capture that fails changes nothing: no table entry, no memory file stays.
  * A table keeps no object alive. Fresh ranks have none: they get everything.
  * torch is imported only for a value that is torch's.

Modules, each after those that it imports:

    dataflow       scopes of a cell, what they bind, and what is bound on every path so far
    tensors        torch storages as buffers: once for each storage, never as a CUDA handle
    parts          what an object is made of, how the step to each part is written, names in annotations
    arrays         NumPy arrays: views share their memory on the other side, and with torch's tensors
    identity       keys of objects; the tables at both ends
    recipes        what pickle cannot send of torch's objects: what makes each again
    push           the content of an object, which fills the one that a rank has
    own_modules    the notebook's own files that a job may import
    names          the names of the notebook that a cell needs, magics and shell commands included
    pickling       picklers and unpicklers, with buffers out of band and keys for known objects
    unpicklable    the path to the part where pickling fails
    walk           objects as they were sent, and whether they would be sent otherwise now
    saved          a session's variables in a directory: format, owner, another number of ranks
    capture        a cell, a call, a push: what is sent for it, ready to be written
    shared_memory  payloads in memory files (or files), written once, held and mapped
"""
