"""`@pytest.mark.distributed(nproc=2)`: a test function that runs on ranks.

pytest's process collects, sets fixtures up and reports, as for any test. The function itself runs on the
ranks of a session that is kept for the tests of a module with equal options. `nblaunch._pytest` is what
pytest loads; it loads this package for the first test with the mark, so that pytest without one pays nothing.

    pytest's process                                   each rank of the module's session
      setup      what the mark asks for is judged
      fixtures
      call       the first time: Surroundings     ──>  prepare: the test's modules, imported with pytest's
                                                       own rewriting of `assert`
                 Target, fixtures and parameters  ──>  call: the function, with copies of these
      report     what ranks printed, folded;      <──  a value, or the exception with `Told`: the failure
                 one outcome of all ranks              as pytest draws it there, and where it is
      end of the module, or a rank was lost: the session is closed

Invariants:
  * What is wrong with a mark is reported at setup, before a process starts.
  * A test gets copies of its fixtures, whatever ranks did to those of the test before.
  * A rank that was lost, or a test that ran out of time, costs the session: the next test gets new ranks.
  * A failure that follows from another rank's is never the one that is reported.

Modules, each after those that it imports:

    asked            the mark: options, time limit, what cannot be distributed
    inside           on a rank: modules with rewritten asserts, the call, a failure as pytest draws it
    outcomes         one outcome of all ranks: the exception to raise, the report to show
    module_sessions  the sessions of a module; a test on its ranks
"""
