"""Checks that both Python programs use. A failed check prints the difference and ends the program."""

import functools
import os
import sys
import time

# Time limit of each wait for a state that must come, in seconds.
TIME_LIMIT = 60


def step(function):
    """Prints what is checked next, so that the last line of a program that hangs shows where."""

    @functools.wraps(function)
    def told(*args):
        print(function.__name__.replace('_', ' '), flush=True)
        return function(*args)

    return told


def endpoints():
    """Returns the hosts and ports of the members."""
    urls = os.environ['ENDPOINTS'].split(',')
    return [(host, int(port)) for host, port in (url.split('//')[1].split(':') for url in urls)]


def equal(what, got, wanted):
    if got != wanted:
        sys.exit(f'{what}: {got!r} instead of {wanted!r}')


def holds(what, condition):
    if not condition:
        sys.exit(f'not so: {what}')


def refused(what, kind, words, call):
    """Checks that `call` raises an exception of this kind whose text contains `words`."""
    try:
        answer = call()
    except kind as error:
        text = ' '.join([str(error), str(getattr(error, 'detail_text', ''))])
        if words not in text:
            sys.exit(f'{what} is refused with {text!r}, not with {words!r}')
    else:
        sys.exit(f'{what} is not refused: {answer!r}')


def until(what, look):
    """Calls `look` repeatedly until it returns a value."""
    end = time.monotonic() + TIME_LIMIT
    while not (found := look()):
        if time.monotonic() > end:
            sys.exit(f'waited {TIME_LIMIT} s in vain for: {what}')
        time.sleep(0.05)
    return found
