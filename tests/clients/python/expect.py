"""What both programmes check with. A check that fails ends the programme and says what differed."""

import functools
import os
import sys
import time

# How long a state is waited for that has to come.
PATIENCE = 60


def step(function):
    """Says what is being checked: if a programme hangs, its last line says where."""

    @functools.wraps(function)
    def told(*args):
        print(function.__name__.replace('_', ' '), flush=True)
        return function(*args)

    return told


def endpoints():
    """The members' hosts and ports."""
    urls = os.environ['ENDPOINTS'].split(',')
    return [(host, int(port)) for host, port in (url.split('//')[1].split(':') for url in urls)]


def equal(what, got, wanted):
    if got != wanted:
        sys.exit(f'{what}: {got!r} instead of {wanted!r}')


def holds(what, condition):
    if not condition:
        sys.exit(f'not so: {what}')


def refused(what, kind, words, call):
    """`call` has to fail with an exception of this kind whose text has these words."""
    try:
        answer = call()
    except kind as error:
        text = ' '.join([str(error), str(getattr(error, 'detail_text', ''))])
        if words not in text:
            sys.exit(f'{what} is refused with {text!r}, not with {words!r}')
    else:
        sys.exit(f'{what} is not refused: {answer!r}')


def until(what, look):
    """Looks until there is something."""
    end = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > end:
            sys.exit(f'waited {PATIENCE} s in vain for: {what}')
        time.sleep(0.05)
    return found
