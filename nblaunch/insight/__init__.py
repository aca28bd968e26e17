"""What a run shows of its inside: the pure half of curves, timelines, comparisons and reports.

The ranks' half is `nblaunch.probes`: it measures, and sends what it has measured through the hub, as ranks
send all they say. Here that becomes a table, a summary, a verdict or a drawing:

    rank: probes  ── messages ──>  fold of the run  ──>  insight: table, summary, drawing  ──>  result, view

Nothing here starts a thread, opens a socket or loads torch. What has not been asked for costs nothing.

Modules, each after those that it imports:

    markup      HTML pieces: escaped text, colours, states, rows of a table
    svg         the elements that drawings in a saved notebook are made of
    curves      what ranks have logged, folded: a band over the ranks, and who is apart
    charts      these curves as drawings
    folding     merges the sequences of several ranks; a common item stands once
    run_report  a run as one bounded document, as JSON and as Markdown; no secrets in it
    difference  what a comparison of ranks has found: text and HTML
    comparing   are the ranks equal: the questions, and what follows from the answers
    intervals   sorted intervals of time: union, length, what is common
    trace       one Chrome trace of many ranks, from parts that they have compressed
    profile     the profiles of all ranks on one clock: steps, waits, stragglers, bandwidth
    timeline    a profile as a table and a strip of time for each rank
"""
