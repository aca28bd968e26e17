"""What measures inside a rank, for those who want to see inside a run: the ranks' half of `nblaunch.insight`.

A probe does nothing until the user's code or an option asks for it; then it measures on the rank's own
threads, and hands what it has found to a function that sends it. It knows neither the socket nor the job:
`nblaunch.rank.main` tells it when a job begins and ends.

A probe that fails must not fail the job: it ends, and says so in a warning. What a probe puts into torch or
into another library (a hook, a callback, a dispatch mode), it takes out again at the end of the job.

Modules, each after those that it imports:

    held          what the rank holds when it runs out of memory: the largest tensors, with names
    steps         the training step that the rank is in
    rank_metrics  the numbers that it logs; a GPU is not waited for
    loggers       points out of what transformers, Lightning and tqdm log
    sites         where the user's code is, for a probe that torch calls
    collectives   every collective of this process, before it begins
    hosts         compares collectives with ranks on other machines
    desync        whether the ranks' next collectives are the same
    nonfinite     the first loss, gradient or input of a collective that is not finite
    watch         `--watch`: installs these for the time of a job
    blocks        a tensor as hashes of its blocks
    contents      any object as entries that ranks can compare
    surroundings  what a rank runs in: packages, variables, flags, seeds
    diff          a rank's answers when ranks are compared; the comparison over the process group
    profiling     torch.profiler around a job, the hub's clock, and the collectives as torch records them
"""
