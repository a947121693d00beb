// One worker, or one producer, of BullMQ, for scripts/bench:
//
//   node peer.js PORT add JOBS GOROUTINES       adds jobs one by one, so many at the same time
//   node peer.js PORT bulk JOBS SIZE            adds jobs by addBulk, SIZE at a time
//   node peer.js PORT run JOBS SLOTS [MAX MS]   runs jobs that do nothing, at most MAX in MS milliseconds
//
// It prints "ready" when it is connected, begins when a line comes in, and prints a line of JSON at the
// end: {"starts": [milliseconds since 1970, ...]}, empty of a producer.
import { createInterface } from 'node:readline';
import { once } from 'node:events';
import { Queue, Worker } from 'bullmq';

const [port, mode, ...rest] = process.argv.slice(2);
const [jobs, width, max, duration] = rest.map(Number);
const connection = { host: '127.0.0.1', port: Number(port), maxRetriesPerRequest: null };
const name = 'bench';
const kept = { removeOnComplete: true, removeOnFail: true };

const input = createInterface({ input: process.stdin });
const starting = once(input, 'line');

async function produce(add, times, parallel) {
  const queue = new Queue(name, { connection });
  await queue.waitUntilReady();
  console.log('ready');
  await starting;
  let next = 0;
  const one = async () => {
    while (next < times) await add(queue, next++);
  };
  await Promise.all(Array.from({ length: parallel }, one));
  console.log(JSON.stringify({ starts: [] }));
  await queue.close();
}

async function run() {
  const starts = [];
  let done;
  const finished = new Promise((resolve) => (done = resolve));
  const worker = new Worker(
    name,
    async () => {
      starts.push(performance.timeOrigin + performance.now());
    },
    { connection, autorun: false, concurrency: width, ...(max ? { limiter: { max, duration } } : {}) },
  );
  let completed = 0;
  worker.on('completed', () => {
    if (++completed === jobs) done();
  });
  await worker.waitUntilReady();
  console.log('ready');
  await starting;
  worker.run();
  await finished;
  console.log(JSON.stringify({ starts }));
  await worker.close();
}

const job = (i) => ({ name: 'call', data: { tenant: `tenant-${i % 10}` }, opts: kept });
switch (mode) {
  case 'add':
    await produce((queue, i) => queue.add('call', job(i).data, kept), jobs, width);
    break;
  case 'bulk':
    await produce(
      (queue, i) => queue.addBulk(Array.from({ length: Math.min(width, jobs - i * width) }, (_, k) => job(i * width + k))),
      Math.ceil(jobs / width),
      4,
    );
    break;
  case 'run':
    await run();
    break;
  default:
    console.error(`peer.js: ${mode}: must be add, bulk or run`);
    process.exitCode = 2;
}
input.close();
process.stdin.destroy();
