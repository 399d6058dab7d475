// Watches what a spec file names with npm etcd3 and prints what an application saw, one JSON object a line.
//
// It owns the record; it must not know Keyward, and it does not judge: tests/etcd does. Reconnecting is left to the library, as it
// is; the contract of the command line and of the lines is in ../README.md.
'use strict';

const fs = require('fs');
const { parseArgs } = require('util');
const { status } = require('@grpc/grpc-js');
const { Etcd3 } = require('etcd3');
const { version } = require('etcd3/package.json');
const rounds = require('./rounds.js');

// Between two tries to open a watch, and how long the library may take to cancel its watches, in ms.
const PAUSE = 100;
const FAREWELL = 5000;

const started = process.hrtime.bigint();

// Prints one line at once, so that a reader sees it even if the process dies next.
function emit(kind, fields = {}) {
  const t = Number((process.hrtime.bigint() - started) / 1000000n);
  fs.writeSync(1, JSON.stringify({ t, kind, ...fields }) + '\n');
}

// Code and text of an error as an application gets them: the library's own errors have a class each and no code.
function described(error) {
  if (typeof error.code !== 'number') return { code: error.constructor.name, message: error.message };
  const words = status[error.code].toLowerCase().split('_');
  const code = words.map(word => word[0].toUpperCase() + word.slice(1)).join('');
  return { code: { Ok: 'OK', Cancelled: 'Canceled' }[code] ?? code, message: error.details ?? error.message };
}

// One event as the contract has it.
function shown({ type, kv, prev_kv: was }) {
  const revisions = pair => [pair.mod_revision, pair.create_revision, pair.version].map(Number);
  const previous = was ? [was.value.toString(), ...revisions(was)] : null;
  return [type.toLowerCase(), kv.key.toString(), kv.value.toString(), ...revisions(kv), String(kv.lease), previous];
}

const pause = () => new Promise(resolve => setTimeout(resolve, PAUSE));

// One watch of the spec, over all its openings.
class Watch {
  constructor(client, spec) {
    Object.assign(this, { client, spec, name: spec.name, next: spec.start_revision });
    this.stands = new Promise(resolve => (this.stood = resolve));
  }

  unsupported() {
    return this.spec.fragment ? `etcd3 ${version} has no option for fragments` : null;
  }

  range() {
    return { start: this.spec.key, end: this.spec.range_end };
  }

  open() {
    const builder = this.client.watch();
    if (this.spec.range_end) builder.inRange(this.range());
    else builder.key(this.spec.key);
    if (this.next) builder.startRevision(String(this.next));
    if (this.spec.prev_kv) builder.withPreviousKV();
    const left = { put: 'noput', delete: 'nodelete' };
    const only = Object.keys(left).filter(kind => !this.spec.filters.includes(left[kind]));
    if (only.length === 1) builder.only(...only);
    // Not create(): what came in one go with Created would be told to nobody, before its promise is looked at.
    this.watcher = builder
      .watcher()
      .on('connected', response => {
        emit('created', { watch: this.name, revision: Number(response.header.revision) });
        this.stood();
      })
      .on('data', response => this.received(response))
      .on('disconnected', error => emit('error', { op: 'watch', watch: this.name, ...described(error) }))
      .on('error', error => this.canceled(error));
  }

  received({ header, events }) {
    const revision = Number(header.revision);
    if (events.length === 0) return emit('progress', { watch: this.name, revision });
    this.next = Number(events[events.length - 1].kv.mod_revision) + 1;
    return emit('response', { watch: this.name, revision, events: events.map(shown) });
  }

  async canceled(error) {
    // etcd gives no reason for a compaction, and one for anything else; the library shows the reason only.
    if (error.message !== 'Watcher canceled: ') {
      emit('ended', { watch: this.name, ...described(error) });
      await pause();
      return this.open();
    }
    emit('compacted', { watch: this.name });
    this.next = (await this.list()) + 1;
    emit('listed', { watch: this.name, revision: this.next - 1 });
    return this.open();
  }

  // Reads the range, as an application does that must begin anew; returns the revision that it read.
  async list() {
    for (;;) {
      try {
        const single = () => this.client.get(this.spec.key).exec();
        const range = () => this.client.getAll().inRange(this.range()).exec();
        return Number((await (this.spec.range_end ? range() : single())).header.revision);
      } catch (error) {
        emit('error', { op: 'get', watch: this.name, ...described(error) });
        await pause();
      }
    }
  }
}

function connect(options) {
  const auth = options.user && {
    username: options.user,
    password: fs.readFileSync(options['password-file'], 'utf8').replace(/[\r\n]+$/, ''),
  };
  return new Etcd3({ hosts: options.endpoints.split(','), ...(auth && { auth }) });
}

async function run(scenario, options) {
  emit('start', { client: `npm etcd3 ${version}`, unix_ms: Date.now() });
  const client = connect(options);
  if (scenario === 'rounds') return rounds.run(client, options.prefix, { emit, described });
  const all = JSON.parse(fs.readFileSync(options.spec, 'utf8')).watches.map(spec => new Watch(client, spec));
  const watches = all.filter(watch => !watch.unsupported());
  for (const watch of all) {
    if (watch.unsupported()) emit('unsupported', { watch: watch.name, why: watch.unsupported() });
    else watch.open();
  }
  process.on('SIGTERM', async () => {
    const cancels = watches.map(watch => watch.watcher.cancel());
    await Promise.race([Promise.allSettled(cancels), new Promise(resolve => setTimeout(resolve, FAREWELL))]);
    emit('end');
    process.exit(0);
  });
  await Promise.all(watches.map(watch => watch.stands));
  emit('ready');
}

function fatal(error) {
  emit('fatal', described(error));
  process.exit(1);
}

const flag = { type: 'string', default: '' };
let parsed;
try {
  const options = { endpoints: flag, user: flag, 'password-file': flag, spec: flag, prefix: flag };
  parsed = parseArgs({ options, allowPositionals: true });
  const needed = { watchers: 'spec', rounds: 'prefix' }[parsed.positionals.join()];
  if (!needed || !parsed.values.endpoints || !parsed.values[needed]) throw new Error('what to do, and where?');
} catch (error) {
  const usage = 'watchers watchers|rounds --endpoints HOST:PORT[,…] --user NAME --password-file FILE (--spec SPEC.json | --prefix PREFIX)';
  process.stderr.write(`${error.message}\nusage: ${usage}\n`);
  process.exit(64);
}
// The library throws at a response that it cannot place, where no application can catch it.
process.on('uncaughtException', fatal);
run(parsed.positionals[0], parsed.values).catch(fatal);
