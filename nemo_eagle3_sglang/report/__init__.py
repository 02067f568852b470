"""One HTML page from the files of one or several runs: read them, draw them, put them on a page."""
