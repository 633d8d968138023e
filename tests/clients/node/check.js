// Exercises the API of etcd3 (npm) over gRPC with TLS, with all members as its hosts.
'use strict';

const assert = require('node:assert/strict');
const fs = require('node:fs');
const { once } = require('node:events');
const { Etcd3, EtcdPermissionDeniedError, EtcdAuthenticationFailedError, EtcdLeaseInvalidError,
  EtcdLockFailedError, GRPCOutOfRangeError, GRPCInvalidArgumentError } = require('etcd3');

// Time limit of each wait for a state that must come, in milliseconds.
const TIME_LIMIT = 60_000;

const hosts = process.env.ENDPOINTS.split(',');
const credentials = { rootCertificate: fs.readFileSync(process.env.CACERT) };
const connect = (auth) => new Etcd3({ hosts, credentials, auth });
// A member may not have applied yet what another member has answered.
const connectToOne = (auth) => new Etcd3({ hosts: hosts[0], credentials, auth });

async function until(what, look) {
  for (const end = Date.now() + TIME_LIMIT; Date.now() < end;) {
    const found = await look();
    if (found) return found;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  assert.fail(`waited ${TIME_LIMIT / 1000} s in vain for: ${what}`);
}

const refused = (what, answer, kind, words) =>
  assert.rejects(answer, (error) => error instanceof kind && words.test(error.message)
    || assert.fail(`${what} is refused with ${error.name}: ${error.message}`), what);

/** The next events of a watch, as many as are asked for. */
function events(watcher) {
  const seen = [];
  watcher.on('put', (kv, before) => seen.push(['put', `${kv.key}`, `${kv.value}`, before ? `${before.value}` : undefined]));
  watcher.on('delete', (kv, before) => seen.push(['delete', `${kv.key}`, '', before ? `${before.value}` : undefined]));
  return (count) => until(`${count} events; so far ${JSON.stringify(seen)}`,
    () => seen.length >= count && seen.splice(0, count));
}

const checks = {
  async 'reads and writes'(client) {
    await client.put('kv/a').value('old');
    const before = await client.put('kv/a').value('new').getPrevious();
    assert.equal(`${before.value}`, 'old', 'the value before');
    assert.equal(await client.get('kv/a').string(), 'new');
    assert.equal(await client.get('kv/a').revision(before.mod_revision).string(), 'old', 'an old revision');
    assert.equal(await client.get('none').string(), null, 'what is not there');
    const names = Array.from({ length: 120 }, (_, n) => `many/${String(n).padStart(3, '0')}`);
    await Promise.all(names.map((name) => client.put(name).value(name)));
    const many = () => client.getAll().prefix('many/');
    assert.deepEqual(await many().sort('Key', 'Descend').keys(), [...names].reverse(), 'a prefix');
    assert.equal(await many().count(), 120, 'a count');
    assert.deepEqual(await many().sort('Mod', 'Ascend').limit(1).strings().then((found) => Object.values(found).length), 1);
    const range = client.getAll().inRange({ start: 'many/007', end: 'many/010' });
    assert.deepEqual(await range.keys(), ['many/007', 'many/008', 'many/009'], 'a range is half open');
    assert.equal((await client.delete().prefix('many/')).deleted, '120', 'deleting a prefix');
    const space = client.namespace('space/');
    await space.put('a').value(5);
    assert.equal(await client.get('space/a').number(), 5, 'a namespace');
  },

  async transactions(client) {
    await client.put('txn/a').value('1');
    const first = await client.if('txn/a', 'Value', '==', '1').and('txn/b', 'Create', '==', 0)
      .then(client.put('txn/b').value('x'), client.get('txn/b')).else(client.put('txn/b').value('wrong')).commit();
    assert.equal(first.succeeded, true, 'both comparisons hold');
    assert.equal(`${first.responses[1].response_range.kvs[0].value}`, 'x', 'what it wrote, read in it');
    const second = await client.if('txn/b', 'Version', '>', 1)
      .then(client.put('txn/b').value('wrong')).else(client.get('txn/b')).commit();
    assert.equal(second.succeeded, false, 'the comparison does not hold');
    assert.equal(`${second.responses[0].response_range.kvs[0].value}`, 'x', 'the other branch');
    await client.put('txn/count').value(0);
    await Promise.all(Array.from({ length: 8 }, () => client.stm({ retries: 50 }).transact(async (tx) => {
      await tx.put('txn/count').value(await tx.get('txn/count').number() + 1);
    })));
    assert.equal(await client.get('txn/count').number(), 8, 'what eight transactions of one client each counted');
  },

  async watches(client) {
    const begun = (await client.put('watch/a').value('1')).header.revision;
    await client.put('watch/a').value('2');
    await client.delete().key('watch/a');
    const watcher = await client.watch().prefix('watch/').startRevision(begun).withPreviousKV().create();
    const next = events(watcher);
    const only = await client.watch().prefix('watch/').only('delete').create();
    const deletions = events(only);
    assert.deepEqual(await next(3), [['put', 'watch/a', '1', undefined], ['put', 'watch/a', '2', '1'],
      ['delete', 'watch/a', '', '2']], 'the events since a revision');
    await client.put('watch/b').value('3');
    await client.delete().key('watch/b');
    assert.deepEqual(await next(2), [['put', 'watch/b', '3', undefined], ['delete', 'watch/b', '', '3']]);
    assert.deepEqual(await deletions(1), [['delete', 'watch/b', '', undefined]], 'deletions only');
    await watcher.cancel();
    await only.cancel();
  },

  async leases(client) {
    const lease = client.lease(5);
    const id = await lease.grant();
    await lease.put('lease/a').value('x');
    const about = await client.leaseClient.leaseTimeToLive({ ID: id, keys: true });
    assert.deepEqual([about.grantedTTL, about.keys.map(String)], ['5', ['lease/a']], 'what a lease has');
    // The client by itself keeps the lease alive a few times within its TTL.
    await once(lease, 'keepaliveSucceeded');
    await once(lease, 'keepaliveSucceeded');
    assert.equal(await client.get('lease/a').string(), 'x', 'the key of a lease that is kept alive');
    await lease.revoke();
    assert.equal(await client.get('lease/a').string(), null, 'the key of a lease that was revoked');
    const short = client.lease(1, { autoKeepAlive: false });
    const next = events(await client.watch().key('lease/b').create());
    await short.put('lease/b').value('x');
    assert.deepEqual((await next(2)).map(([kind]) => kind), ['put', 'delete'], 'the key of a lease that ends');
    await refused('a keep-alive of what is over', short.keepaliveOnce(), EtcdLeaseInvalidError, /./);
  },

  async locks(client) {
    const lock = client.lock('one').ttl(120);
    await lock.acquire();
    await refused('a lock that another one has', client.lock('one').acquire(), EtcdLockFailedError, /./);
    await lock.release();
    assert.equal(await client.lock('one').do(async () => 'got'), 'got', 'a lock that is free again');
  },

  async elections(client) {
    const election = client.election('one', 60);
    const first = election.campaign('first');
    await first.wait();
    assert.equal(await election.leader(), 'first', 'the leader');
    const observer = await election.observe();
    const second = election.campaign('second');
    await second.getCampaignKey();
    await first.proclaim('still first');
    await until('the observer to be told', () => observer.leader() === 'still first');
    const elected = second.wait();
    await first.resign();
    await elected;
    await until('the observer to be told of the second', () => observer.leader() === 'second');
    await observer.cancel();
    await second.resign();
  },

  async errors(client) {
    await refused('an empty key', client.put('').value('x').exec(), GRPCInvalidArgumentError, /etcdserver: key is not provided/);
    await refused('a future revision', client.get('kv/a').revision(1_000_000).exec(), GRPCOutOfRangeError,
      /etcdserver: mvcc: required revision is a future revision/);
    const one = connectToOne();
    const now = (await one.put('kv/a').value('newest')).header.revision;
    await one.kv.compact({ revision: now });
    await refused('a compacted revision', one.get('kv/a').revision(now - 1).exec(), GRPCOutOfRangeError,
      /etcdserver: mvcc: required revision has been compacted/);
    await refused('a lease that is not', client.put('x').value('x').lease('12345').exec(), Error,
      /etcdserver: requested lease not found/);
    const watcher = one.watch().key('kv/a').startRevision('1').watcher();
    const [error] = await once(watcher, 'error', { signal: AbortSignal.timeout(TIME_LIMIT) });
    assert.match(error.message, /^Watcher canceled/, 'a watch from before the compaction');
    one.close();
  },

  async cluster(client) {
    assert.equal((await client.cluster.memberList({})).members.length, hosts.length, 'the members');
    assert.match((await client.maintenance.status()).version, /^3\./);
  },

  async users() {
    const client = connectToOne();
    await client.user('root').create('of root').then((user) => user.addRole('root'));
    const reader = await client.role('reader').create();
    await reader.grant({ permission: 'Read', range: client.range({ prefix: 'kv/' }) });
    await client.user('alice').create('of alice').then((user) => user.addRole(reader));
    await client.auth.authEnable();
    await refused('nobody', client.get('kv/a').exec(), Error, /etcdserver: user name is empty/);
    const wrong = connectToOne({ username: 'alice', password: 'wrong' });
    await refused('a wrong password', wrong.get('kv/a').exec(), EtcdAuthenticationFailedError, /./);
    wrong.close();
    const alice = connectToOne({ username: 'alice', password: 'of alice' });
    assert.equal(await alice.get('kv/a').string(), 'newest', 'what a user may read');
    await refused('what a user may not write', alice.put('kv/a').value('x').exec(), EtcdPermissionDeniedError, /./);
    alice.close();
    const other = connectToOne({ username: 'root', password: 'of root' });
    const next = events(await other.watch().key('kv/b').create());
    await other.put('kv/b').value('by root');
    assert.equal((await next(1))[0][2], 'by root', 'a watch with a password');
    await other.auth.authDisable();
    other.close();
    client.close();
  },
};

async function main() {
  const client = connect();
  for (const [name, check] of Object.entries(checks)) {
    console.log(name);
    await check(client);
  }
  client.close();
  console.log('done');
}

main().then(() => process.exit(0), (error) => {
  console.error(error);
  process.exit(1);
});
