//! What a worker of this bench does: it takes memory for a program, opens endpoints over it with
//! lookups of different kinds, and runs the program over whichever it is told.

use std::io::BufRead;
use std::time::Instant;

use anyhow::{Context, bail};
use memferry::message::ShareableBuffer;
use memferry::sys::clock;

use super::order::{Answer, Order, Pattern, Ran, Report};
use super::puts::Places;
use super::team::Team;
use super::windows::{HEADER_BYTES, WindowMember};
use super::workload::{Any, Problem, Workload};
use crate::bench::group::worker::WorkerArgs;
use crate::show;

/// Where windows begin: so that lines of every length begin with them.
const BOUNDARY_BYTES: usize = 1 << 20;

/// Serves the bench until it is told to stop.
pub(crate) fn work(args: &WorkerArgs) -> anyhow::Result<()> {
    let leads = args.rank == 0;
    if leads {
        show::print("ready\n")?;
    }
    let mut worker = Worker { args, stage: None, opened: 0 };
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        // What the group says when it goes is no order.
        let Ok(order) = serde_json::from_str(&line) else { break };
        let result = worker.carry_out(order);
        if leads {
            let answer = match &result {
                Ok(answer) => answer.clone(),
                Err(error) => Answer::Failed(format!("{error:#}")),
            };
            show::print(&format!("{}\n", serde_json::to_string(&answer)?))?;
        }
        // After an error the members may not agree any more on what comes next.
        result?;
    }
    Ok(())
}

struct Worker<'a> {
    args: &'a WorkerArgs,
    stage: Option<Stage>,
    /// How many endpoints there were, to give each a name.
    opened: usize,
}

/// A program, its memory, and the endpoints over it.
struct Stage {
    // Dropped before the memory that they expose.
    members: Vec<Option<WindowMember>>,
    program: Any,
    memory: ShareableBuffer,
    /// The part of it that is exposed.
    begin: usize,
    length: usize,
    /// How often the members have met, over whichever endpoint.
    meetings: u64,
}

impl Worker<'_> {
    fn carry_out(&mut self, order: Order) -> anyhow::Result<Answer> {
        match order {
            Order::Begin(problem) => self.begin(problem)?,
            Order::Open(table) => self.open(table)?,
            Order::Run(number) => return Ok(Answer::Ran(self.stage()?.run(number)?)),
            Order::Put { endpoint, pattern } => {
                return Ok(Answer::Ran(self.stage()?.put(endpoint, pattern)?));
            }
            Order::Report(number) => {
                return Ok(Answer::Report(Box::new(self.stage()?.report(number)?)));
            }
            Order::Close(number) => {
                let stage = self.stage()?;
                stage.members.get_mut(number).context("no such endpoint")?.take();
            }
            Order::End => self.stage = None,
        }
        Ok(Answer::Done)
    }

    fn stage(&mut self) -> anyhow::Result<&mut Stage> {
        self.stage.as_mut().context("there is no program")
    }

    fn begin(&mut self, problem: Problem) -> anyhow::Result<()> {
        self.stage = None;
        let program = Any::new(problem, self.args.rank, self.args.size)?;
        let length = HEADER_BYTES + program.bytes();
        let mut memory = ShareableBuffer::new(length + BOUNDARY_BYTES)?;
        let begin = memory.as_ptr().align_offset(BOUNDARY_BYTES);
        if program.is_dense() {
            memory.fill(0);
        }
        self.stage =
            Some(Stage { members: Vec::new(), program, memory, begin, length, meetings: 0 });
        Ok(())
    }

    fn open(&mut self, table: super::order::Table) -> anyhow::Result<()> {
        let WorkerArgs { name, rank, size, .. } = self.args;
        let name = format!("{name}.{}", self.opened);
        self.opened += 1;
        let stage = self.stage()?;
        let exposed = &mut stage.memory[stage.begin..][..stage.length];
        let memory = (exposed.as_mut_ptr(), exposed.len());
        // SAFETY: the memory is longer than a header, begins on a boundary, and is dropped after
        // all members.
        let member = unsafe { WindowMember::join(&name, *rank, *size, table.settings(), memory) }?;
        stage.members.push(Some(member));
        Ok(())
    }
}

impl Stage {
    fn parts(&mut self, number: usize) -> anyhow::Result<(&mut WindowMember, &mut Any, &mut u64)> {
        let member = self.members.get_mut(number).and_then(Option::as_mut);
        let member = member.context("no such endpoint")?;
        member.resume(self.meetings);
        Ok((member, &mut self.program, &mut self.meetings))
    }

    fn run(&mut self, number: usize) -> anyhow::Result<Ran> {
        let (member, program, meetings) = self.parts(number)?;
        program.prepare(member)?;
        member.barrier()?;
        let (begin, processor_begin) = (Instant::now(), clock::process_cpu_ns());
        program.run(member)?;
        let ns = begin.elapsed().as_nanos() as f64;
        let processor_ns = (clock::process_cpu_ns() - processor_begin) as f64;
        let digest = program.check(member)?;
        *meetings = member.meetings();
        Ok(Ran { ns, processor_ns, digest })
    }

    /// The leader puts, the others wait until it has.
    fn put(&mut self, number: usize, pattern: Pattern) -> anyhow::Result<Ran> {
        let (member, _, meetings) = self.parts(number)?;
        member.barrier()?;
        let mut ns = 0.0;
        if member.rank() == 0 {
            let remote = member.remote(1)?;
            let data = vec![0x5A; pattern.bytes];
            let mut places = Places::new(pattern, remote.len());
            // Until the cache holds what it will hold.
            for _ in 0..pattern.count.min(2048) {
                remote.put(places.next(), &data)?;
            }
            let begin = Instant::now();
            for _ in 0..pattern.count {
                remote.put(places.next(), &data)?;
            }
            ns = begin.elapsed().as_nanos() as f64 / pattern.count as f64;
        }
        member.barrier()?;
        *meetings = member.meetings();
        Ok(Ran { ns, processor_ns: 0.0, digest: 0 })
    }

    fn report(&mut self, number: usize) -> anyhow::Result<Report> {
        let (member, ..) = self.parts(number)?;
        let endpoint = member.endpoint();
        let (Some(counters), Some(memory)) = (endpoint.lookup_counters(), endpoint.lookup_memory())
        else {
            bail!("nothing was looked up");
        };
        Ok(Report {
            page_table_bytes: page_table_bytes()?,
            attached_window_bytes: member.attached_bytes(),
            ..Report::new(&counters, memory)
        })
    }
}

/// What the kernel says that the page tables of this process take.
fn page_table_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB"));
    Ok(kilobytes.context("the kernel does not say")?.trim().parse::<u64>()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_what_page_tables_take() {
        let bytes = page_table_bytes().unwrap();
        assert!(bytes > 0 && bytes.is_multiple_of(4096), "{bytes}");
    }
}
