//! The command line. Parsing validates every value, so that the commands receive only valid sizes
//! and names of existing benches.

#[cfg(feature = "bench")]
mod bench;
mod top;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Command, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use memferry::engine::factories;
use memferry_bench::results::size;
#[cfg(feature = "bench")]
use memferry_bench::worker::WorkerArgs;

#[cfg(feature = "bench")]
pub(crate) use bench::BenchArgs;
pub(crate) use top::{SortKey, TopArgs};

/// Memferry moves memory: measure, check and explain copies and messages on this machine.
#[derive(Debug, Parser)]
#[command(name = "memferry", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Measure this machine: a dozen lines within a minute, one bench by name, or all
    #[cfg(feature = "bench")]
    Bench(BenchArgs),
    /// Tell how to get the benches, which this program was built without
    #[cfg(not(feature = "bench"))]
    Bench {
        /// What to measure
        #[arg(value_name = "ARGUMENTS", trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
    /// Make a report, or the figure of speeds, from recorded output of `memferry bench --json`
    Report(ReportArgs),
    /// Check what this machine can do, what is missing, and how to fix it
    Doctor(DoctorArgs),
    /// Print the plan for a copy or a message of a size, and its reason
    Explain(ExplainArgs),
    /// Load a file to a GPU or to memory, and print how fast
    Load(LoadArgs),
    /// Watch processes that use Memferry: copies, messages, channels, peers, latencies
    Top(TopArgs),
    /// Replay a trace of address lookups with translation caches of other sizes
    Replay(ReplayArgs),
    /// Start an MPI program over Memferry
    ///
    /// The arguments are those of mpirun: `memferry mpirun -n 4 ./program`. A first argument such as
    /// mpiexec or /opt/mpi/bin/mpirun is the launcher; the default is the mpirun in the PATH.
    Mpirun(MpirunArgs),
    /// Start a program, without changing it, with its copies counted or shared with spare cores
    ///
    /// `memferry run --profile ./program` counts memcpy, memmove, memset and memcmp by size and caller, and
    /// reports at the end of the program. `memferry run --copies ./program` shares its large copies and fills
    /// with spare cores. `memferry run --shared-heap ./program` lets peers map its large allocations.
    Run(RunArgs),
    /// Print the environment variables that make MPI programs run over Memferry: eval "$(memferry env)"
    Env(EnvArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell to complete for
        shell: Shell,
    },
    /// Writes a manual page for each command into a folder, for `cargo xtask install`
    #[command(hide = true)]
    ManPages {
        /// The folder
        folder: PathBuf,
    },
    /// The peer of the messages that `memferry doctor` sends
    #[command(hide = true)]
    Partner {
        /// The name of its endpoint
        #[arg(long)]
        name: String,
    },
    /// Queries a libfabric for the provider, for `memferry doctor`
    #[command(hide = true)]
    FabricProbe {
        /// The library
        library: PathBuf,
        /// The file of the provider
        provider: PathBuf,
    },
    /// The part of `memferry bench devices` inside the virtual machine
    #[cfg(feature = "bench")]
    #[command(hide = true)]
    DeviceGuest {
        /// Measure fewer points
        #[arg(long)]
        quick: bool,
    },
    /// A process of a group that a bench has started
    #[cfg(feature = "bench")]
    #[command(hide = true)]
    Worker(WorkerArgs),
}

impl CliCommand {
    /// Whether another `memferry` process started this one, with the same environment.
    pub(crate) fn is_started_by_memferry(&self) -> bool {
        match self {
            Self::Partner { .. } | Self::FabricProbe { .. } => true,
            #[cfg(feature = "bench")]
            Self::DeviceGuest { .. } | Self::Worker(_) => true,
            _ => false,
        }
    }
}

/// Arguments of `memferry load`.
#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// The file; the header of a `.safetensors` file is checked first
    pub(crate) file: PathBuf,
    /// The number of the GPU to load to; without it the file is loaded to memory
    #[arg(long, value_name = "NUMBER")]
    pub(crate) gpu: Option<usize>,
    /// How many threads read
    #[arg(long, value_name = "COUNT")]
    pub(crate) threads: Option<usize>,
    /// Read past the page cache, whatever it has; for GPUs, since loads to memory go through it
    #[arg(long, requires = "gpu")]
    pub(crate) direct: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `memferry report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Files with the output of `memferry bench --json`, or folders of such files
    #[arg(value_name = "RUN", required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// The file of the report; memferry-report.html, or none if only --headline is given
    #[arg(long, value_name = "FILE.html")]
    pub(crate) out: Option<PathBuf>,
    /// Draw messages and copies by size into this file
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) headline: Option<PathBuf>,
    /// Show the developers' performance targets in the report
    #[arg(long)]
    pub(crate) bars: bool,
}

/// Arguments of `memferry doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print every check with its details and its fix
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) verbose: bool,
    /// Measure the machine again (a third of a second) and save the profile for all programs
    #[arg(long)]
    pub(crate) measure: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `memferry explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// The size of the copy, such as 4096, 64k, 3.5MiB or 1GB
    #[arg(value_name = "SIZE", value_parser = size::parse, required_unless_present = "message")]
    pub(crate) bytes: Option<u64>,
    /// Explain a message of this size between two processes instead of a copy
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[arg(conflicts_with_all = ["bytes", "hot", "cold", "gpu", "ioat", "nic", "dsa", "all"])]
    pub(crate) message: Option<u64>,
    /// The buffers are in the caches, or will be used soon: copy through the caches
    #[arg(long, conflicts_with = "cold")]
    pub(crate) hot: bool,
    /// The buffers are not in the caches
    #[arg(long)]
    pub(crate) cold: bool,
    /// Plan with a GPU: the first, or the one of this number: --gpu or --gpu=1
    #[arg(long, value_name = "NUMBER", num_args = 0..=1)]
    #[arg(require_equals = true, default_missing_value = "0")]
    pub(crate) gpu: Option<usize>,
    /// Plan with the I/OAT devices that are bound to vfio-pci, or with those of these addresses:
    /// --ioat, --ioat=ADDRESS,ADDRESS or --ioat=off
    #[arg(long, value_name = "DEVICES", num_args = 0..=1)]
    #[arg(require_equals = true, default_missing_value = "auto")]
    #[arg(value_parser = |text: &str| parse_devices("ioat", text))]
    pub(crate) ioat: Option<String>,
    /// Plan with a network card in loopback: the first that is bound to vfio-pci, or this one: --nic,
    /// --nic=ADDRESS or --nic=off
    #[arg(long, value_name = "DEVICE", num_args = 0..=1)]
    #[arg(require_equals = true, default_missing_value = "auto")]
    #[arg(value_parser = |text: &str| parse_devices("nic", text))]
    pub(crate) nic: Option<String>,
    /// Plan with the DSA queues or devices of this machine, or with these: --dsa, --dsa=wq0.0,
    /// --dsa=ADDRESS or --dsa=off
    #[arg(long, value_name = "DEVICES", num_args = 0..=1)]
    #[arg(require_equals = true, default_missing_value = "auto")]
    #[arg(value_parser = |text: &str| parse_devices("dsa", text))]
    pub(crate) dsa: Option<String>,
    /// Show every limit that is the same on all machines, not only the important ones
    #[arg(long)]
    pub(crate) all: bool,
    /// The memory of the source; the default is host
    #[arg(long, value_name = "MEMORY", requires = "gpu")]
    pub(crate) from: Option<MemoryLocation>,
    /// The memory of the target; the default is host
    #[arg(long, value_name = "MEMORY", requires = "gpu")]
    pub(crate) to: Option<MemoryLocation>,
    /// Host memory is used for the first time; matters with MEMFERRY_CUDA_SOLE_USER=1, which
    /// registers reused memory
    #[arg(long, requires = "gpu", conflicts_with = "registered")]
    pub(crate) fresh: bool,
    /// Host memory is already registered with the GPU
    #[arg(long, requires = "gpu")]
    pub(crate) registered: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MemoryLocation {
    /// Ordinary memory
    Host,
    /// Memory of the GPU
    Device,
}

/// Arguments of `memferry replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// A trace: with MEMFERRY_LOOKUP_TRACE=NAME, endpoints write files NAME.PROCESS.NUMBER
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `memferry mpirun`.
#[derive(Debug, Args)]
pub(crate) struct MpirunArgs {
    /// The launcher, or the folder in which its MPI is installed
    #[arg(long, value_name = "PATH")]
    pub(crate) mpi: Option<PathBuf>,
    /// Execute collectives of ranks on one host by Memferry, not by the MPI library
    #[arg(long)]
    pub(crate) collectives: bool,
    /// Put allocations from 64 KiB on into memory that other ranks can map: their messages are faster, a
    /// fork copies them
    #[arg(long)]
    pub(crate) shared_heap: bool,
    /// The arguments of mpirun
    #[arg(value_name = "ARGUMENTS", required = true, trailing_var_arg = true)]
    #[arg(allow_hyphen_values = true)]
    pub(crate) words: Vec<OsString>,
}

/// Arguments of `memferry run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Count copies, fills and comparisons by size and caller, and report at the end
    #[arg(long, conflicts_with = "copies")]
    pub(crate) profile: bool,
    /// Share large copies and fills with spare cores
    #[arg(long)]
    pub(crate) copies: bool,
    /// Put allocations from 64 KiB on into memory that peers can map, for messages of Memferry
    #[arg(long)]
    pub(crate) shared_heap: bool,
    /// Report as one JSON object instead of text
    #[arg(long, requires = "profile", conflicts_with = "copies")]
    pub(crate) json: bool,
    /// Write the report to this file instead of the standard error output
    #[arg(long, value_name = "FILE", requires = "profile", conflicts_with = "copies")]
    pub(crate) output: Option<PathBuf>,
    /// Write a report with plots to this file as well
    #[arg(long, value_name = "FILE.html", requires = "profile", conflicts_with = "copies")]
    pub(crate) report: Option<PathBuf>,
    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    #[arg(allow_hyphen_values = true)]
    pub(crate) words: Vec<OsString>,
}

impl RunArgs {
    /// What is wrong with the arguments. A mistyped option would be taken for the command.
    fn problem(&self) -> Option<String> {
        let first = self.words.first().map(|word| word.to_string_lossy()).unwrap_or_default();
        if first.starts_with('-') {
            return Some(format!("there is no option {first}; `memferry run --help` lists all"));
        }
        let has_use = self.profile || self.copies || self.shared_heap;
        (!has_use).then(|| "nothing to do; add --profile, --copies or --shared-heap".to_owned())
    }
}

/// Arguments of `memferry env`.
#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    /// The launcher, or the folder in which its MPI is installed
    #[arg(long, value_name = "PATH")]
    pub(crate) mpi: Option<PathBuf>,
    /// Print one JSON object instead of lines for a shell
    #[arg(long)]
    pub(crate) json: bool,
}

/// Checks the text of an argument that selects devices of an engine.
fn parse_devices(engine: &str, text: &str) -> Result<String, String> {
    match factories().iter().find(|factory| factory.name() == engine) {
        Some(factory) if factory.parse(text).is_none() => {
            Err(format!("expected {}", factory.expected()))
        }
        _ => Ok(text.to_owned()),
    }
}

/// Parses the command line. If it is invalid, prints the error and exits with status 2.
pub(crate) fn parse() -> Cli {
    let mut command = command();
    let matches = command.get_matches_mut();
    let cli = Cli::from_arg_matches(&matches);
    let cli = cli.unwrap_or_else(|error| error.format(&mut command).exit());
    if let CliCommand::Run(run) = &cli.command
        && let Some(problem) = run.problem()
    {
        command.error(clap::error::ErrorKind::UnknownArgument, problem).exit();
    }
    cli
}

/// The command line, with the benches of this build in the help of `bench`.
pub(crate) fn command() -> Command {
    let command = Cli::command();
    #[cfg(feature = "bench")]
    let command = command.mut_subcommand("bench", |bench| bench.after_help(bench::list()));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn a_size_arrives_in_bytes() {
        let cli = Cli::try_parse_from(["memferry", "explain", "64k", "--cold"]).unwrap();
        let CliCommand::Explain(args) = cli.command else { panic!("not explain") };
        assert_eq!((args.bytes, args.hot, args.cold), (Some(64 << 10), false, true));
    }

    #[test]
    fn a_gpu_is_the_first_unless_it_has_a_number() {
        for (word, number) in [("--gpu", 0), ("--gpu=3", 3)] {
            let words = ["memferry", "explain", word, "64k", "--to", "device", "--fresh"];
            let CliCommand::Explain(args) = Cli::try_parse_from(words).unwrap().command else {
                panic!("not explain")
            };
            assert_eq!((args.bytes, args.gpu, args.fresh), (Some(64 << 10), Some(number), true));
            assert_eq!((args.from, args.to), (None, Some(MemoryLocation::Device)));
        }
    }

    #[test]
    fn devices_that_are_not_valid_are_a_wrong_argument_which_is_named() {
        for wrong in ["--dsa=nonsense", "--dsa=", "--ioat=wq0.0", "--nic=00:04.0,00:04.1"] {
            let error = Cli::try_parse_from(["memferry", "explain", "1M", wrong]).unwrap_err();
            let (flag, _) = wrong.split_once('=').unwrap();
            let text = error.to_string();
            assert_eq!(error.exit_code(), 2);
            assert!(text.contains(flag) && text.contains("expected off, auto"), "{text}");
        }
        for right in ["--dsa", "--dsa=wq0.0,wq0.1", "--dsa=6a:01.0", "--ioat=off", "--nic=00:04.0"]
        {
            assert!(Cli::try_parse_from(["memferry", "explain", "1M", right]).is_ok(), "{right}");
        }
    }

    #[test]
    fn the_words_of_mpirun_are_passed_on_as_they_are() {
        let words =
            ["memferry", "mpirun", "--mpi", "/opt/mpi", "-n", "4", "./a", "--mpi", "--collectives"];
        let CliCommand::Mpirun(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("not mpirun")
        };
        assert_eq!(args.mpi.as_deref(), Some("/opt/mpi".as_ref()));
        assert_eq!(args.words, ["-n", "4", "./a", "--mpi", "--collectives"]);
        assert!(!args.collectives);
        let CliCommand::Mpirun(args) =
            Cli::try_parse_from(["memferry", "mpirun", "--oversubscribe"]).unwrap().command
        else {
            panic!("not mpirun")
        };
        assert_eq!((args.mpi, args.words.len()), (None, 1));
        let words = ["memferry", "mpirun", "--collectives", "-n", "4", "./a"];
        let CliCommand::Mpirun(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("not mpirun")
        };
        assert!(args.collectives);
        assert_eq!(args.words, ["-n", "4", "./a"]);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        for line in [
            &["explain", "1k", "--hot", "--cold"][..],
            &["explain", "1k", "--message", "1k"],
            &["explain", "--message", "1k", "--hot"],
            &["explain", "1k", "--from", "device"],
            &["explain", "1k", "--fresh"],
            &["explain", "1k", "--gpu", "--fresh", "--registered"],
            &["explain", "1k", "--gpu", "--from", "disk"],
            &["explain", "--message", "1k", "--gpu"],
            &["explain"],
            &["bench", "overlap", "--all"],
            &["bench", "--bars"],
            &["report"],
        ] {
            let words = std::iter::once("memferry").chain(line.iter().copied());
            assert_eq!(Cli::try_parse_from(words).unwrap_err().exit_code(), 2);
        }
    }
}
