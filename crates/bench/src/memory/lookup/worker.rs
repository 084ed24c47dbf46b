//! Worker of this bench: it allocates memory for a program, opens endpoints over it with lookups of
//! different kinds, and runs the program over the endpoint that a command names.

use std::io::BufRead;
use std::time::Instant;

use anyhow::{Context, bail};
use memferry::message::ShareableBuffer;
use memferry::sys::clock;

use super::command::{LookupCommand, LookupReply, LookupReport, PutPattern, RunResult};
use super::puts::PutOffsets;
use super::team::Team;
use super::windows::{HEADER_BYTES, WindowMember};
use super::workload::{AnyProgram, Problem, Workload};
use crate::group::worker::WorkerArgs;
use crate::reply::write_line;

/// Alignment of windows, so that lines of every length start at the start of a window.
const BOUNDARY_BYTES: usize = 1 << 20;

/// Serves the bench until the input ends or contains no command.
pub(crate) fn run_worker(args: &WorkerArgs) -> anyhow::Result<()> {
    let leads = args.rank == 0;
    if leads {
        write_line("ready")?;
    }
    let mut worker = LookupWorker { args, state: None, opened: 0 };
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        // The last line of a group, `quit`, is not a command.
        let Ok(order) = serde_json::from_str(&line) else { break };
        let result = worker.execute(order);
        if leads {
            let answer = match &result {
                Ok(answer) => answer.clone(),
                Err(error) => LookupReply::Failed(format!("{error:#}")),
            };
            write_line(&serde_json::to_string(&answer)?)?;
        }
        // After an error the members may be in different states.
        result?;
    }
    Ok(())
}

struct LookupWorker<'a> {
    args: &'a WorkerArgs,
    state: Option<ProgramState>,
    /// Number of endpoints so far, used in their names.
    opened: usize,
}

/// A program, its memory, and the endpoints over it.
struct ProgramState {
    // Dropped before the memory that they expose.
    members: Vec<Option<WindowMember>>,
    program: AnyProgram,
    memory: ShareableBuffer,
    /// Start and length of the exposed part of the memory.
    begin: usize,
    length: usize,
    /// Number of barriers so far, over all endpoints.
    barriers: u64,
}

impl LookupWorker<'_> {
    fn execute(&mut self, order: LookupCommand) -> anyhow::Result<LookupReply> {
        match order {
            LookupCommand::Begin(problem) => self.begin(problem)?,
            LookupCommand::Open(table) => self.open(table)?,
            LookupCommand::Run(number) => return Ok(LookupReply::Ran(self.state()?.run(number)?)),
            LookupCommand::Put { endpoint, pattern } => {
                return Ok(LookupReply::Ran(self.state()?.put(endpoint, pattern)?));
            }
            LookupCommand::Report(number) => {
                return Ok(LookupReply::Report(Box::new(self.state()?.report(number)?)));
            }
            LookupCommand::Close(number) => {
                let stage = self.state()?;
                stage.members.get_mut(number).context("no such endpoint")?.take();
            }
            LookupCommand::End => self.state = None,
        }
        Ok(LookupReply::Done)
    }

    fn state(&mut self) -> anyhow::Result<&mut ProgramState> {
        self.state.as_mut().context("there is no program")
    }

    fn begin(&mut self, problem: Problem) -> anyhow::Result<()> {
        self.state = None;
        let program = AnyProgram::new(problem, self.args.rank, self.args.size)?;
        let length = HEADER_BYTES + program.bytes();
        let mut memory = ShareableBuffer::new(length + BOUNDARY_BYTES)?;
        let begin = memory.as_ptr().align_offset(BOUNDARY_BYTES);
        if program.is_dense() {
            memory.fill(0);
        }
        self.state =
            Some(ProgramState { members: Vec::new(), program, memory, begin, length, barriers: 0 });
        Ok(())
    }

    fn open(&mut self, table: super::command::LookupMode) -> anyhow::Result<()> {
        let WorkerArgs { name, rank, size, .. } = self.args;
        let name = format!("{name}.{}", self.opened);
        self.opened += 1;
        let stage = self.state()?;
        let exposed = &mut stage.memory[stage.begin..][..stage.length];
        let memory = (exposed.as_mut_ptr(), exposed.len());
        // SAFETY: the memory is longer than a header, starts on a boundary, and is dropped after
        // all members.
        let member = unsafe { WindowMember::join(&name, *rank, *size, table.config(), memory) }?;
        stage.members.push(Some(member));
        Ok(())
    }
}

impl ProgramState {
    fn parts(
        &mut self,
        number: usize,
    ) -> anyhow::Result<(&mut WindowMember, &mut AnyProgram, &mut u64)> {
        let member = self.members.get_mut(number).and_then(Option::as_mut);
        let member = member.context("no such endpoint")?;
        member.resume_barriers(self.barriers);
        Ok((member, &mut self.program, &mut self.barriers))
    }

    fn run(&mut self, number: usize) -> anyhow::Result<RunResult> {
        let (member, program, meetings) = self.parts(number)?;
        program.prepare(member)?;
        member.barrier()?;
        let (begin, processor_begin) = (Instant::now(), clock::process_cpu_ns());
        program.run(member)?;
        let ns = begin.elapsed().as_nanos() as f64;
        let processor_ns = (clock::process_cpu_ns() - processor_begin) as f64;
        let digest = program.check(member)?;
        *meetings = member.barriers();
        Ok(RunResult { ns, processor_ns, digest })
    }

    /// The leader puts; the other members wait until it has finished.
    fn put(&mut self, number: usize, pattern: PutPattern) -> anyhow::Result<RunResult> {
        let (member, _, meetings) = self.parts(number)?;
        member.barrier()?;
        let mut ns = 0.0;
        if member.rank() == 0 {
            let remote = member.remote(1)?;
            let data = vec![0x5A; pattern.bytes];
            let mut places = PutOffsets::new(pattern, remote.len());
            // Untimed puts bring the cache to its steady state.
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
        *meetings = member.barriers();
        Ok(RunResult { ns, processor_ns: 0.0, digest: 0 })
    }

    fn report(&mut self, number: usize) -> anyhow::Result<LookupReport> {
        let (member, ..) = self.parts(number)?;
        let endpoint = member.endpoint();
        let (Some(counters), Some(memory)) = (endpoint.lookup_counters(), endpoint.lookup_memory())
        else {
            bail!("nothing was looked up");
        };
        Ok(LookupReport {
            page_table_bytes: page_table_bytes()?,
            attached_window_bytes: member.attached_bytes(),
            ..LookupReport::new(&counters, memory)
        })
    }
}

/// Bytes of the page tables of this process, as the kernel reports them.
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
