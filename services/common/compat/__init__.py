"""Holds what is used of libraries beyond their public interfaces, here by services.common.

Each service that needs it has such a package, with a module for each library. All patches of libraries are there, all
uses of their private attributes and modules, changes of an object's class, and subclasses of classes that are not
public. Each says why it is needed and which versions it was seen with, and has a test in tests/compat that fails when
the library changes.
"""
