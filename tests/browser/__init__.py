"""The panel in a real browser: JupyterLab 4 and Notebook 7, with headless Chromium.

A package, so that the server, the browser and the pages end with its last test.
"""
