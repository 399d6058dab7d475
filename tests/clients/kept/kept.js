// Requests over kept connections of Node's agent, each answered before the next, until SIGTERM. See README.md for the record.
'use strict';
const http = require('http');

// Between two tries to connect, in ms.
const PAUSE = 20;
const [address, path, body, connections] = process.argv.slice(2);
const at = address.lastIndexOf(':');
const agent = new http.Agent({ keepAlive: true, maxSockets: Number(connections) });
const headers = { 'Content-Type': 'application/json', 'Content-Length': Buffer.byteLength(body) };
const options = { agent, headers, host: address.slice(0, at), method: 'POST', path, port: Number(address.slice(at + 1)) };
const count = { answered: 0, closes: 0, refused: 0, wrong: 0, unanswered: 0 };
const texts = [];
let ended = false;

function ask() {
  return new Promise(resolve => {
    const request = http.request(options, answer => {
      answer.resume();
      answer.on('end', () => {
        if (answer.headers.connection === 'close') count.closes += 1;
        if (answer.statusCode === 200) count.answered += 1;
        else {
          count.wrong += 1;
          texts.push(String(answer.statusCode));
        }
        resolve(0);
      });
      answer.on('error', error => {
        count.unanswered += 1;
        texts.push(error.code || error.message);
        resolve(0);
      });
    });
    request.on('error', error => {
      // Nobody listens: nothing was sent.
      if (error.code === 'ECONNREFUSED') {
        count.refused += 1;
        resolve(PAUSE);
      } else {
        count.unanswered += 1;
        texts.push(error.code || error.message);
        resolve(0);
      }
    });
    request.end(body);
  });
}

async function requests() {
  while (!ended) {
    const pause = await ask();
    if (pause) await new Promise(resolve => setTimeout(resolve, pause));
  }
}

const all = Promise.all(Array.from({ length: Number(connections) }, requests));
process.on('SIGTERM', async () => {
  ended = true;
  await all;
  console.log(JSON.stringify({ kind: 'summary', texts: texts.slice(0, 10), ...count }));
  process.exit(0);
});
console.log(JSON.stringify({ kind: 'ready' }));
