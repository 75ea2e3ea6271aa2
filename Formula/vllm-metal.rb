class VllmMetal < Formula
  desc "OpenAI-compatible inference daemon for Apple Silicon, on MLX"
  # Stands in until the project has a public home.
  homepage "https://example.org/vllm-metal"
  license "Apache-2.0"
  # The checkout that this file lies in. A release adds `url` and `sha256` above `license`.
  head "file://#{File.dirname(__dir__)}", using: :git, branch: "main"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  def install
    libexec.install "src/vllm_metal"
    # By opt paths, which outlive upgrades of Python and of this formula.
    (bin/"metal").write <<~PYTHON
      #!#{Formula["python@3.12"].opt_bin}/python3.12 -I
      import sys

      sys.path.insert(0, "#{opt_libexec}")

      from vllm_metal.cli.launcher import main

      main()
    PYTHON
    chmod 0755, bin/"metal"
  end

  def caveats
    <<~EOS
      The first `metal serve` makes a Python environment in ~/.venv-vllm-metal;
      `metal setup` makes it now.

      brew does not restart a running service when it upgrades, nor stop it when it uninstalls:
        after `brew upgrade`:      brew services restart vllm-metal
        before `brew uninstall`:   metal uninstall
    EOS
  end

  service do
    name macos: "org.vllm-metal.serve"
    run [opt_bin/"metal", "serve"]
    keep_alive successful_exit: false
    process_type :interactive
    throttle_interval 10
    stop_timeout 60
    log_path var/"log/vllm-metal.log"
    error_log_path var/"log/vllm-metal.log"
    environment_variables PATH: std_service_path_env
  end

  test do
    assert_match(/^vllm-metal \d+\.\d+/, shell_output("#{bin}/metal --version"))
    assert_match(/^mlx==.*--hash=sha256:/m, shell_output("#{bin}/metal setup --print-lock"))

    python = Formula["python@3.12"].opt_bin/"python3.12"
    label = "import plistlib, sys; print(plistlib.loads(sys.stdin.buffer.read())['Label'])"
    plist = shell_output("#{bin}/metal service plist")
    assert_equal "org.vllm-metal.serve\n", pipe_output("#{python} -c \"#{label}\"", plist, 0)
  end
end
