"""All uses of library internals by services.common.

Each service that uses internals has such a package, or a module `compat`. It contains every patch of a library, every
use of a private attribute or module, every change of an object's class, and every subclass of a class that is not
public. Each of them says why it is needed and which versions it was tested with, and has a test in tests/compat that
fails when the library changes.
"""
