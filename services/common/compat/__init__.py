"""What the services rely on in third-party libraries beyond their public interfaces.

Every patch of a library, private attribute or module, change of an object's class, and subclass of a class that is not
public is in a `compat` package, one for each service that needs it, one module for each library: what it does, why, and
which versions it was seen with. tests/compat has a test for each that fails when the library changes.
"""
