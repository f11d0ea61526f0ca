# transformers joins the names of 500 packages here, which takes longer to read than all that uses them.
from .auto import *  # noqa: F403
