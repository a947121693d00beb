// Adds jobs to BullMQ, prints "ready", and after a line of input runs them, at most MAX a second:
//   node bullmq.js PORT JOBS MAX
// It ends with one line of JSON, the times at which they started, in ms since 1970.
import { once } from 'node:events';
import { Queue, Worker } from 'bullmq';

const [port, jobs, max] = process.argv.slice(2).map(Number);
const connection = { host: '127.0.0.1', port, maxRetriesPerRequest: null };
const queue = new Queue('bench', { connection });
const job = { name: 'call', data: {}, opts: { removeOnComplete: true } };
for (let left = jobs; left > 0; left -= 500) await queue.addBulk(Array(Math.min(left, 500)).fill(job));

const starts = [];
const handler = async () => { starts.push(performance.timeOrigin + performance.now()); };
const limiter = { max, duration: 1000 };
const worker = new Worker('bench', handler, { connection, autorun: false, concurrency: 32, limiter });
await worker.waitUntilReady();
console.log('ready');
await once(process.stdin, 'data');
worker.run();
await new Promise((done) => { let left = jobs; worker.on('completed', () => --left || done()); });
console.log(JSON.stringify(starts));
process.stdin.destroy();
await Promise.all([worker.close(), queue.close()]);
