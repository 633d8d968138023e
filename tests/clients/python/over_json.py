"""Exercises the API of etcd3gw (PyPI) over the JSON gateway; each client of the list uses one member."""

import itertools
import os

import etcd3gw
from etcd3gw import exceptions

from expect import TIME_LIMIT, endpoints, equal, holds, refused, step, until


def connect(member):
    host, port = member
    return etcd3gw.client(host, port, protocol='https', ca_cert=os.environ['CACERT'], timeout=TIME_LIMIT)


@step
def reads_and_writes(clients):
    first, last = clients[0], clients[-1]
    equal('the path of the API', first.api_path, '/v3/')
    equal('a put', first.put('kv/a', b'\x00\xff not text'), True)
    equal('a value, asked of another member', last.get('kv/a'), [b'\x00\xff not text'])
    first.put('kv/a', 'new')
    [(value, about)] = last.get('kv/a', metadata=True)
    equal('a value and its version', (value, about['version']), (b'new', '2'))
    for n in range(60):
        clients[n % len(clients)].put(f'many/{n:02}', str(n))
    found = [(about['key'], value) for value, about in last.get_prefix('many/', sort_order='descend')]
    equal('a prefix, from the last', found,
          [(f'many/{n:02}'.encode(), str(n).encode()) for n in reversed(range(60))])
    found = [about['key'] for _, about in last.get('many/07', metadata=True, range_end='many/10')]
    equal('a range is half open', found, [b'many/07', b'many/08', b'many/09'])
    equal('a limit', len(last.get('many/', range_end='many0', limit=7)), 7)
    old = int(about['mod_revision'])
    first.put('kv/a', 'newest')
    equal('an old revision', last.get('kv/a', revision=old), [b'new'])
    equal('what is not there', last.get('none'), [])
    equal('deleting a key', (last.delete('many/00'), last.delete('many/00')), (True, False))
    equal('deleting a prefix', (first.delete_prefix('many/'), last.get_prefix('many/')), (True, []))
    big = os.urandom(1_000_000)
    first.put('big', big)
    equal('a large value', last.get('big') == [big], True)


@step
def transactions(clients):
    first, last = clients[0], clients[-1]
    equal('a key that is new', first.create('txn/a', '1'), True)
    equal('a key that is there', last.create('txn/a', '2'), False)
    equal('replacing what is another', last.replace('txn/a', '2', '3'), False)
    equal('replacing what it is', last.replace('txn/a', '1', '3'), True)
    equal('what it became', first.get('txn/a'), [b'3'])


@step
def watches(clients):
    first, last = clients[0], clients[-1]
    first.put('watch/a', '1')
    [(_, about)] = first.get('watch/a', metadata=True)
    first.put('watch/a', '2')
    first.delete('watch/a')
    seen, cancel = last.watch_prefix('watch/', start_revision=int(about['mod_revision']), prev_kv=True)
    first.put('watch/b', '3')
    kinds = []
    for event in itertools.islice(seen, 4):
        kv = event['kv']
        kinds.append((event.get('type', 'PUT'), kv['key'], kv.get('value'), 'prev_kv' in event))
    equal('the events since a revision', kinds, [
        ('PUT', b'watch/a', b'1', False), ('PUT', b'watch/a', b'2', True),
        ('DELETE', b'watch/a', None, True), ('PUT', b'watch/b', b'3', False)])
    cancel()
    refused('a watch of what never comes', exceptions.WatchTimedOut, '',
            lambda: last.watch_once('watch/never', timeout=1))


@step
def leases(clients):
    first, last = clients[0], clients[-1]
    lease = first.lease(60)
    last.put('lease/a', 'x', lease=lease)
    equal('the keys of a lease', lease.keys(), [b'lease/a'])
    before = until('some of its time to be over', lambda: ttl if (ttl := lease.ttl()) < 59 else None)
    equal('a keep-alive', lease.refresh(), 60)
    until('a lease that is kept alive to have more time again',
          lambda: lease.refresh() and lease.ttl() > before)
    equal('revoking', lease.revoke(), True)
    equal('the key of a lease that was revoked', last.get('lease/a'), [])
    equal('a keep-alive of what is over', lease.refresh(), -1)
    first.put('lease/b', 'x', lease=first.lease(1))
    until('the key of a lease to end with it', lambda: last.get('lease/b') == [])


@step
def locks(clients):
    first, last = clients[0], clients[-1]
    mine, other = first.lock('one', ttl=120), last.lock('one', ttl=120)
    equal('a free lock', mine.acquire(), True)
    equal('a lock that another one has', other.acquire(), False)
    equal('whether it is held', (mine.is_acquired(), other.is_acquired()), (True, False))
    equal('a lock is refreshed', mine.refresh(), 120)
    equal('letting go of what is not mine', other.release(), False)
    equal('letting go', mine.release(), True)
    equal('the lock that is free again', other.acquire(), True)


@step
def errors(clients):
    first = clients[0]
    refused('an empty key', exceptions.Etcd3Exception, 'etcdserver: key is not provided',
            lambda: first.put('', 'x'))
    refused('a path that is not', exceptions.Etcd3Exception, 'Not Found',
            lambda: first.post(first.get_url('/kv/nothing'), json={}))
    gone = first.lease(60)
    gone.revoke()
    refused('a lease that is not', exceptions.Etcd3Exception, 'etcdserver: requested lease not found',
            lambda: first.put('x', 'x', lease=gone))


@step
def cluster(clients):
    equal('the members', len(clients[0].members()), len(clients))
    equal('one leader', len({client.status()['leader'] for client in clients}), 1)
    holds('a version of etcd 3', clients[0].status()['version'].startswith('3.'))


@step
def users(clients):
    """The client has no methods for users, but can send any request with any header."""
    first, last = clients[0], clients[-1]

    def auth(client, path, **about):
        return client.post(client.get_url(f'/auth/{path}'), json=about)

    for name in ['root', 'alice']:
        auth(first, 'user/add', name=name, password=f'of {name}')
    auth(first, 'role/add', name='reader')
    # kv/ to kv0
    auth(first, 'role/grant', name='reader', perm={'permType': 'READ', 'key': 'a3Yv', 'range_end': 'a3Yw'})
    auth(first, 'user/grant', user='root', role='root')
    auth(first, 'user/grant', user='alice', role='reader')
    auth(first, 'enable')
    refused('nobody', exceptions.Etcd3Exception, 'etcdserver: user name is empty', lambda: first.get('kv/a'))
    refused('a wrong password', exceptions.Etcd3Exception,
            'etcdserver: authentication failed, invalid user ID or password',
            lambda: auth(last, 'authenticate', name='alice', password='wrong'))
    last.session.headers['Authorization'] = auth(last, 'authenticate', name='alice', password='of alice')['token']
    equal('what a user may read', last.get('kv/a'), [b'newest'])
    refused('what a user may not write', exceptions.Etcd3Exception, 'etcdserver: permission denied',
            lambda: last.put('kv/a', 'x'))
    first.session.headers['Authorization'] = auth(first, 'authenticate', name='root', password='of root')['token']
    auth(first, 'disable')


def main():
    clients = [connect(member) for member in endpoints()]
    for check in [reads_and_writes, transactions, watches, leases, locks, errors, cluster, users]:
        check(clients)
    print('done', flush=True)
    # The thread of a cancelled watch may still run.
    os._exit(0)


main()
