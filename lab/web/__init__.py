"""One self-contained page of studies: its contents, charts, timelines, and the live server."""
