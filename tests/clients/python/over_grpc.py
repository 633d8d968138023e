"""Exercises the API of etcd3 (PyPI) over gRPC with TLS; each client of the list uses one member."""

import hashlib
import io
import itertools
import os
import threading

import etcd3
import grpc
from etcd3 import etcdrpc, events, exceptions

from expect import TIME_LIMIT, endpoints, equal, holds, refused, step, until


def connect(member, **user):
    host, port = member
    return etcd3.client(host, port, ca_cert=os.environ['CACERT'], timeout=TIME_LIMIT, **user)


@step
def reads_and_writes(clients):
    first, last = clients[0], clients[-1]
    first.put('kv/a', 'old')
    before = first.put('kv/a', 'new', prev_kv=True)
    equal('the value before', before.prev_kv.value, b'old')
    value, about = last.get('kv/a')
    equal('a value, asked of another member', value, b'new')
    equal('its version', about.version, 2)
    equal('its revision', about.mod_revision, before.header.revision)
    for n in range(120):
        clients[n % len(clients)].put(f'many/{n:03}', str(n))
    found = [(about.key, value) for value, about in last.get_prefix('many/', sort_order='descend')]
    equal('a prefix, from the last', found,
          [(f'many/{n:03}'.encode(), str(n).encode()) for n in reversed(range(120))])
    found = [about.key for _, about in last.get_range('many/007', 'many/010')]
    equal('a range is half open', found, [b'many/007', b'many/008', b'many/009'])
    found = [value for value, _ in last.get_prefix('many/00', sort_order='ascend', sort_target='value')]
    equal('a prefix by value', found, [str(n).encode() for n in range(10)])
    found = [(about.key, value) for value, about in last.get_prefix('many/11', keys_only=True)]
    equal('keys only', len(found), 10)
    equal('the value of what has none', last.get('none'), (None, None))
    equal('deleting a key', last.delete('many/000'), True)
    equal('deleting it again', last.delete('many/000'), False)
    equal('deleting a prefix', first.delete_prefix('many/').deleted, 119)
    big = os.urandom(1_000_000)
    first.put('big', big)
    equal('a large value', last.get('big')[0] == big, True)


@step
def transactions(clients):
    first, last = clients[0], clients[-1]
    of = first.transactions
    equal('a key that is new', first.put_if_not_exists('txn/a', '1'), True)
    equal('a key that is there', last.put_if_not_exists('txn/a', '2'), False)
    equal('replacing what is another', last.replace('txn/a', '2', '3'), False)
    equal('replacing what it is', last.replace('txn/a', '1', '3'), True)
    done, answers = first.transaction(
        compare=[of.value('txn/a') == '3', of.version('txn/a') > 1, of.create('txn/b') == 0,
                 of.mod('txn/a') != 1],
        success=[of.put('txn/b', 'x'), of.get('txn/b'),
                 of.txn(compare=[of.value('txn/a') == '3'], success=[of.delete('txn/a')], failure=[])],
        failure=[])
    equal('all comparisons hold', done, True)
    equal('what it wrote, read in it', answers[1][0][0], b'x')
    inner = answers[2].response_txn
    equal('a transaction within', (inner.succeeded, inner.responses[0].response_delete_range.deleted), (True, 1))
    done, answers = last.transaction(
        compare=[of.value('txn/b') == 'x', of.version('txn/b') > 1],
        success=[of.put('txn/b', 'wrong')], failure=[of.get('txn/b')])
    equal('one comparison does not hold', (done, answers[0][0][0]), (False, b'x'))


@step
def watches(clients):
    first, last = clients[0], clients[-1]
    begun = first.put('watch/a', '1').header.revision
    first.put('watch/a', '2')
    first.delete('watch/a')
    seen, cancel = last.watch_prefix('watch/', start_revision=begun, prev_kv=True)
    puts, stop_puts = first.watch_prefix('watch/')
    first.put('watch/b', '3')
    kinds = [(type(event), event.key, event.value, event.prev_value) for event in itertools.islice(seen, 4)]
    equal('the events since a revision', kinds, [
        (events.PutEvent, b'watch/a', b'1', b''), (events.PutEvent, b'watch/a', b'2', b'1'),
        (events.DeleteEvent, b'watch/a', b'', b'2'), (events.PutEvent, b'watch/b', b'3', b'')])
    equal('the first event of a watch from now on', next(puts).value, b'3')
    stop_puts()
    cancel()
    # All watches share one stream, and a watch that misses events doesn't affect the others.
    many = [last.watch(f'watch/many/{n}') for n in range(50)]
    for n in range(50):
        clients[n % len(clients)].put(f'watch/many/{n}', str(n))
    for n, (events_of, stop) in enumerate(many):
        equal('the event of one of many watches', next(events_of).value, str(n).encode())
        stop()


@step
def leases(clients):
    first, last = clients[0], clients[-1]
    lease = first.lease(60)
    last.put('lease/a', 'x', lease=lease.id)
    equal('the keys of a lease', list(last.get_lease_info(lease.id).keys), [b'lease/a'])
    equal('what it was granted', lease.granted_ttl, 60)
    before = until('some of its time to be over',
                   lambda: lease.remaining_ttl if lease.remaining_ttl < 59 else None)
    equal('a keep-alive through another member', list(last.refresh_lease(lease.id))[0].TTL, 60)

    def has_more():
        lease.refresh()
        return lease.remaining_ttl > before

    until('a lease that is kept alive to have more time again', has_more)
    lease.revoke()
    equal('the key of a lease that was revoked', last.get('lease/a')[0], None)
    equal('a keep-alive of what is over', list(last.refresh_lease(lease.id))[0].TTL, 0)
    seen, cancel = last.watch('lease/b')
    first.put('lease/b', 'x', lease=first.lease(1))
    equal('the key of a lease that ends', [type(next(seen)), type(next(seen))],
          [events.PutEvent, events.DeleteEvent])
    cancel()


@step
def locks(clients):
    first, last = clients[0], clients[-1]
    mine, other = first.lock('one', ttl=120), last.lock('one', ttl=120)
    equal('a free lock', mine.acquire(), True)
    equal('whether it is held', (mine.is_acquired(), other.is_acquired()), (True, False))
    equal('a lock that another one has', other.acquire(timeout=1), False)
    got = []
    waits = threading.Thread(target=lambda: got.append(other.acquire(timeout=TIME_LIMIT)))
    waits.start()
    equal('letting go', mine.release(), True)
    waits.join()
    equal('the lock of who waited', (got, other.is_acquired()), ([True], True))
    other.release()


@step
def compaction(clients):
    first, last = clients[0], clients[-1]
    old = first.put('old', '1').header.revision
    first.put('old', '2')
    now = first.put('old', '3').header.revision
    first.compact(now)
    # A member that serves the newest revision has also applied the compaction.
    equal('the newest', last.get('old')[0], b'3')
    seen, cancel = last.watch_response('old', start_revision=old)
    refused('a watch from before the compaction', exceptions.RevisionCompactedError, '',
            lambda: next(seen))
    refused('a compaction of what was compacted', grpc.RpcError,
            'etcdserver: mvcc: required revision has been compacted', lambda: last.compact(now))
    refused('a compaction of the future', grpc.RpcError,
            'etcdserver: mvcc: required revision is a future revision', lambda: last.compact(now + 1000))


@step
def errors(clients):
    first = clients[0]
    refused('an empty key', grpc.RpcError, 'etcdserver: key is not provided', lambda: first.put('', 'x'))
    refused('a lease that is not', grpc.RpcError, 'etcdserver: requested lease not found',
            lambda: first.put('x', 'x', lease=12345))
    refused('a value too large', grpc.RpcError, 'etcdserver: request is too large',
            lambda: first.put('x', b'x' * 1_600_000))
    twice = [first.transactions.put('x', '1'), first.transactions.put('x', '2')]
    refused('one key put twice', grpc.RpcError, 'etcdserver: duplicate key given in txn request',
            lambda: first.transaction(compare=[], success=twice, failure=[]))


@step
def cluster(clients):
    members = list(clients[0].members)
    equal('the members', len(members), len(clients))
    status = [client.status() for client in clients]
    equal('one leader', len({each.leader.id for each in status}), 1)
    holds('a version of etcd 3', all(each.version.startswith('3.') for each in status))
    equal('alarms', list(clients[0].list_alarms()), [])
    saved = io.BytesIO()
    clients[-1].snapshot(saved)
    data, proof = saved.getvalue()[:-32], saved.getvalue()[-32:]
    equal('the checksum at the end of a snapshot', hashlib.sha256(data).digest(), proof)


@step
def users(clients, members):
    auth = etcdrpc.AuthStub(clients[0].channel)
    for name in ['root', 'alice']:
        auth.UserAdd(etcdrpc.AuthUserAddRequest(name=name, password=f'of {name}'))
    auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name='reader'))
    auth.RoleGrantPermission(etcdrpc.AuthRoleGrantPermissionRequest(
        name='reader', perm={'permType': 'READ', 'key': b'kv/', 'range_end': b'kv0'}))
    auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user='root', role='root'))
    auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user='alice', role='reader'))
    auth.AuthEnable(etcdrpc.AuthEnableRequest())
    refused('nobody', grpc.RpcError, 'etcdserver: user name is empty', lambda: clients[0].get('kv/a'))
    refused('a wrong password', grpc.RpcError, 'etcdserver: authentication failed, invalid user ID or password',
            lambda: connect(members[0], user='alice', password='wrong'))
    # A member accepts a token once it has applied the entry that assigned it.
    alice = connect(members[-1], user='alice', password='of alice')
    equal('what a user may read', alice.get('kv/a')[0], b'new')
    refused('what a user may not write', grpc.RpcError, 'etcdserver: permission denied',
            lambda: alice.put('kv/a', 'x'))
    refused('what a user may not read', grpc.RpcError, 'etcdserver: permission denied',
            lambda: alice.get('watch/b'))
    root = connect(members[0], user='root', password='of root')
    seen, cancel = root.watch('kv/b')
    root.put('kv/b', 'by root')
    equal('a watch with a password', next(seen).value, b'by root')
    cancel()
    etcdrpc.AuthStub(root.channel).AuthDisable(etcdrpc.AuthDisableRequest(), metadata=root.metadata)
    equal('what everybody may read again', clients[0].get('kv/b')[0], b'by root')


def main():
    members = endpoints()
    clients = [connect(member) for member in members]
    for check in [reads_and_writes, transactions, watches, leases, locks, compaction, errors, cluster]:
        check(clients)
    users(clients, members)
    print('done', flush=True)
    # The client never ends its watch threads.
    os._exit(0)


main()
