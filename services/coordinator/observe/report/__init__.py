"""`lockstep report`: what a run left, as one page that needs no network and no server."""
