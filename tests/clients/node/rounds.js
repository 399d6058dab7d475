// The scenario `rounds`: a client that logs in once, holds a watch and a lease, and does one thing of each kind for each SIGUSR2.
//
// It must not know what happens between the rounds. What etcd3 does not do by itself is not done here.
'use strict';

// How long one thing may take, in ms; and the lease, in seconds.
const LIMIT = 10000;
const TTL = 600;

// What a watch has shown, or why it ended.
class Values {
  constructor(watcher) {
    this.shown = new Set();
    this.ended = null;
    this.waiting = [];
    this.stands = new Promise(resolve => watcher.once('connected', resolve));
    watcher.on('put', pair => this.change(() => this.shown.add(pair.value.toString())));
    watcher.on('error', error => this.change(() => (this.ended = error)));
  }

  change(what) {
    what();
    for (const look of this.waiting.splice(0)) look();
  }

  async waitFor(value) {
    while (!this.shown.has(value)) {
      if (this.ended) throw this.ended;
      await new Promise(resolve => this.waiting.push(resolve));
    }
  }
}

// `record` has how a line is printed and an error described.
async function run(client, prefix, { emit, described }) {
  const signals = [];
  let woken = () => {};
  for (const name of ['SIGUSR2', 'SIGTERM']) {
    process.on(name, () => {
      signals.push(name);
      woken();
    });
  }

  async function did(round, op, doing) {
    const begun = Date.now();
    let timer;
    const late = new Promise(resolve => (timer = setTimeout(resolve, LIMIT, { code: 'Timeout', message: '' })));
    const done = doing().then(() => ({ code: 'OK', message: '' }), described);
    const outcome = await Promise.race([done, late]);
    clearTimeout(timer);
    emit('did', { round, op, ...outcome, ms: Date.now() - begun });
  }

  await client.put(prefix + 'seed').value('seed');
  const lease = client.lease(TTL);
  await lease.grant();
  await lease.keepaliveOnce();
  let lost = null;
  lease.on('lost', error => (lost = error));
  const watch = new Values(client.watch().key(prefix + 'watched').watcher());
  await watch.stands;
  emit('ready');

  for (let number = 1; ; number++) {
    if (signals.length === 0) await new Promise(resolve => (woken = resolve));
    if (signals.shift() === 'SIGTERM') break;
    await did(number, 'watch', () => watch.waitFor(String(number)));
    await did(number, 'new watch', () => new Values(client.watch().key(prefix + 'seed').startRevision('1').watcher()).waitFor('seed'));
    await did(number, 'read', () => client.get(prefix + 'seed').exec());
    await did(number, 'write', () => client.put(prefix + 'written').value(String(number)).exec());
    await did(number, 'keepalive', async () => {
      await lease.keepaliveOnce();
      if (lost) throw lost;
    });
    await did(number, 'grant', () => client.lease(TTL, { autoKeepAlive: false }).grant());
    emit('round', { round: number });
  }
  emit('end');
  process.exit(0);
}

module.exports = { run };
