"""A run drawn as text, as static HTML, or as a live panel. Views draw the state; they decide nothing.

The thread that called `run` (or the one of `--background`) owns the view. It opens the view once the runtime
has the job, draws about ten times a second while it waits, and closes the view with the final state.
Each time it passes the `RunState` of that moment, a frozen snapshot, so a view needs no lock and no message.

    RunState ─┬─ output: lines and displays of each rank, equal ones of several ranks folded
              ├─ summary: headline, failures, attempts, warnings, as lines
              │
              ├──> text            the same for the same run: terminals, nbval, `repr`
              ├──> terminal_view   new lines as they come, above one status line; without it, `shell_logs`
              ├──> html            no script, no style sheet: for saved notebooks
              └──> panel_parts ──HTML──> panel.js, which patches; replaced by `html` when the run has ended

A rank's output passes through a screen: carriage returns, cursor movement and colours become lines, so a
progress bar that redraws itself a thousand times is one line. Merging ranks depends on the content alone,
never on the order of arrival.

Invariants:
  * Text and HTML of a run hold no time, no process id, and nothing else that differs from run to run, but the
    hosts of ranks that failed or hang, where there are several; ranks are in rank order. What takes the
    panel's place says how long the run took; a front end that compares outputs has no panel. Together they
    stay below 1 MB, whatever 64 ranks print: the middle is left out.
  * What a rank prints is text, escaped once, here. HTML that it displays is in a frame without scripts.
  * What is live and what is saved look alike: the panel's parts are drawn by the functions of `html`. The
    page keeps only what is its reader's: focus, selection, scrolling, what is chosen, unfolded or filtered.
  * The cost of the panel grows with what changed since the last draw, not with the output so far. Parts and
    lines take 32 kB a second at most, in ten updates; where more changes, each has its turn.
  * A view that raises is not drawn again, except for its end; the run goes on (`GuardedView`).
  * However many ranks there are, no view has a line for each: ranks that are alike share a row, which can be
    unfolded, hosts whose ranks are alike are one line, and those that differ are named. The panel has a cell
    for each rank, in a row for each host.
  * Widgets and IPython are loaded only by the views that use them.

Modules, each after those that it imports:

    screen         text as a terminal shows it; a screen whose lines are numbered and tracked
    alike          ranks that are alike, in one row
    output         what ranks wrote, folded, and cut to a budget
    mime           displays as HTML that stays within its element, and as the panel draws them
    summary        how a run stands or ended, in lines; the header; torchelastic's events as a table
    html           a run as static HTML
    panel_output   output as deltas: numbered lines and displays, new or changed
    panel_log      these of all ranks as one list of HTML rows, in which equal lines stand once
    text           a run as text
    panel_parts    everything that the panel shows, as HTML in parts, and which of them changed; no widget
    terminal_view  a run in a terminal: lines as they come, the status line, streams that step aside
    shell_logs     the output of a session's job in a shell: `python -m nblaunch logs`
    panel          the widget that sends them, also to pages that come later
    display        chooses a view, and guards it
"""
