def test_probe(kernel):
    ran = kernel.ok("""
    %%distributed -n 2 --out res
    print("hello", rank)
    rank
    """)
    print(ran)
    assert kernel.value("res.values") == [0, 1]

def test_probe2(kernel):
    err = kernel.fails("""
    %%distributed -n 2 --out res
    1/rank
    """)
    print(err)
    assert kernel.value("res.failures[0].rank") == 0

def test_probe3():
    import nblaunch
    assert nblaunch.run(lambda: 3, nproc=2).values == [3, 3]

def test_probe4(script, terminal):
    p = script("import nblaunch\nprint(nblaunch.run(lambda: 5, nproc=2).values)")
    print(p)
    assert "[5, 5]" in p.stdout
    p = terminal(["%load_ext nblaunch", "%%distributed -n 2\nrank"])
    print(p.stdout, p.stderr)
    assert p.returncode == 0
