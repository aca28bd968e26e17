"""An IPython without a kernel, as programs embed it."""

from __future__ import annotations


def test_under_auto_what_is_run_silently_stays_in_the_notebook(script):
    program = """
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()
        shell.history_manager.enabled = False

        def run(cell, **how):
            shell.run_cell(cell, **how).raise_error()

        for cell in ("%load_ext nblaunch", "%distributed start -n 2", "%distributed auto on"):
            run(cell, store_history=True)
        run("hidden = 1; 'not shown'", silent=True)
        run("hidden += 1", store_history=False)
        run("of_the_ranks = rank", store_history=True)
        run("%distributed pull of_the_ranks", store_history=True)
        print(shell.user_ns["hidden"], shell.user_ns["of_the_ranks"])
        run("%distributed stop", store_history=True)
    """
    done = script(program)
    assert done.returncode == 0, done.stderr
    assert "not shown" not in done.stdout
    assert "2 [0, 1]" in done.stdout
